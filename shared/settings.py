"""Typed settings from the environment.

A service declares one frozen dataclass; field `lease_seconds` of a class with prefix
`READYMARK_INGEST_` is read from `READYMARK_INGEST_LEASE_SECONDS`. A field made with
`setting(default, env="...")` is read from the variable it names, which lets services
share one. All faults are reported at once, and an unknown variable under the prefix is
a fault too, since it is most likely a typing error.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

Settings = TypeVar("Settings")

# Addresses that clients use share the services' prefixes.
CLIENT_VARIABLES = frozenset(
    {"READYMARK_INGEST_ADDRESS", "READYMARK_EMBEDDER_ADDRESS", "READYMARK_SEARCH_ADDRESS"}
)
SECRET = "secret"


class SettingsError(Exception):
    """The environment is not usable; the text lists every fault, one a line."""


def setting(default: Any = dataclasses.MISSING, *, env: str | None = None, secret: bool = False) -> Any:
    """Declares a field with its own variable name, or one whose value is never logged."""
    metadata = {"env": env, SECRET: secret}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def variable_name(field: dataclasses.Field[Any], prefix: str) -> str:
    return field.metadata.get("env") or prefix + field.name.upper()


def from_environment(
    cls: type[Settings], prefix: str, environment: Mapping[str, str], *, also_known: type[Any] | None = None
) -> Settings:
    """Returns `cls` filled from `environment`; raises SettingsError with all faults at once.

    `also_known`: settings of a sister process that shares the prefix and the environment.
    """
    faults: list[str] = []
    values: dict[str, Any] = {}
    known: set[str] = set()
    if also_known is not None:
        known |= {variable_name(field, prefix) for field in dataclasses.fields(also_known)}
    types = typing.get_type_hints(cls)
    for field in dataclasses.fields(typing.cast(Any, cls)):
        name = variable_name(field, prefix)
        known.add(name)
        text = environment.get(name)
        if text is None or text == "":
            if field.default is dataclasses.MISSING:
                faults.append(f"{name} is not set")
            continue
        try:
            values[field.name] = _parse(text, types[field.name])
        except ValueError as error:
            faults.append(f"{name}: {error}")
    faults.extend(
        f"{name} is not a setting of this service"
        for name in environment
        if name.startswith(prefix) and name not in known and name not in CLIENT_VARIABLES
    )
    if not faults:
        try:
            return cls(**values)
        except ValueError as error:
            faults.extend(str(error).splitlines())
    raise SettingsError("\n".join(faults))


def describe(settings: Any) -> dict[str, Any]:
    """Returns the settings as a dict for the log, secrets left out."""
    return {
        field.name: "***" if field.metadata.get(SECRET) else getattr(settings, field.name)
        for field in dataclasses.fields(settings)
    }


def _parse(text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is not None or not isinstance(kind, type):
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in {"1", "true", "yes", "on"}:
            return True
        if lowered in {"0", "false", "no", "off"}:
            return False
        raise ValueError(f"{text!r} is not true or false")
    if kind is int:
        return int(text)
    if kind is float:
        return float(text)
    return text
