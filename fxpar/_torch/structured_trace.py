"""The private PyTorch names behind structured traces, which TORCH_TRACE turns on and tlparse shows."""

from torch._logging._internal import LazyTraceHandler, trace_log, trace_structured


def is_tracing() -> bool:
    """Whether a structured trace is written."""
    # Without TORCH_TRACE the handler has no folder. Others, such as pytest's, are no reason to write down graphs.
    return any(isinstance(each, LazyTraceHandler) and each.root_dir is not None for each in trace_log.handlers)


def trace_artifact(name: str, content: str) -> None:
    """Add a text to the trace, as a file `name` of what is being compiled, if anything is."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: content,
        expect_trace_id=False,
    )
