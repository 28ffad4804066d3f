"""From token ids to vectors: the ONNX Runtime session.

Owns the session and its options. Takes whatever rows it is given, pads them to the longest and
pools each over its own tokens; which rows go together is the scheduler's choice. Used by several
threads at once; ONNX Runtime releases the interpreter's lock while it computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime

from services.embedder.model_files import ModelFiles, ModelFilesError
from services.embedder.pooling import Vectors, normalise, pool
from services.embedder.tokenizing import TokenIds

PROVIDERS = {
    "cpu": ["CPUExecutionProvider"],
    "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"],
}


class OnnxEncoder:
    """One loaded graph."""

    def __init__(self, files: ModelFiles, provider: str) -> None:
        """Raises ModelFilesError when the graph is not usable or the provider is not there."""
        self._pooling = files.pooling
        self._pad_token_id = files.pad_token_id
        wanted = PROVIDERS[provider]
        if wanted[0] not in onnxruntime.get_available_providers():
            raise ModelFilesError(
                f"The execution provider {wanted[0]} is not in this build of ONNX Runtime; "
                "install onnxruntime-gpu or set READYMARK_EMBEDDER_PROVIDER=cpu."
            )
        self._session = onnxruntime.InferenceSession(
            str(files.graph), sess_options=_session_options(), providers=wanted
        )
        self.providers: tuple[str, ...] = tuple(self._session.get_providers())
        # ONNX Runtime falls back to the CPU in silence when a device cannot be opened.
        if self.providers[0] != wanted[0]:
            raise ModelFilesError(f"{wanted[0]} could not be started; the device is missing or in use.")
        self._inputs = frozenset(item.name for item in self._session.get_inputs())
        unknown = self._inputs - {"input_ids", "attention_mask", "token_type_ids"}
        if unknown or "input_ids" not in self._inputs:
            raise ModelFilesError(f"{files.graph} asks for the inputs {sorted(self._inputs)}.")
        self._output = self._token_output(files)
        self.dimension: int = self.encode([np.array([files.pad_token_id], np.int64)]).shape[1]

    def encode(self, rows: Sequence[TokenIds]) -> Vectors:
        """Returns one vector a row, pooled and of length 1; a row without a usable result is NaN."""
        lengths = [len(row) for row in rows]
        ids = np.full((len(rows), max(lengths)), self._pad_token_id, np.int64)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : lengths[index]] = row
            mask[index, : lengths[index]] = 1
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        feed = {name: values for name, values in feed.items() if name in self._inputs}
        (hidden,) = self._session.run([self._output], feed)
        return normalise(pool(hidden.astype(np.float32, copy=False), lengths, self._pooling))

    def _token_output(self, files: ModelFiles) -> str:
        names = [item.name for item in self._session.get_outputs()]
        for name in ("last_hidden_state", "token_embeddings", names[0]):
            output = next((item for item in self._session.get_outputs() if item.name == name), None)
            if output is not None and len(output.shape) == 3:
                return str(name)
        raise ModelFilesError(f"{files.graph} gives {names}; token vectors are needed.")


def _session_options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    # Several single-threaded runs side by side: measured twice as fast on shared cores as one
    # run with several threads, and no affinity is set that a container would refuse.
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    # A spinning thread burns a core for a second after each query.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # Every batch has another shape, so remembered memory patterns are never used again.
    options.enable_mem_pattern = False
    return options
