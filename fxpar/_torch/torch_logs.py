"""The private PyTorch names behind TORCH_LOGS."""

from torch._logging._internal import log_registry


def is_in_torch_logs(logger: str) -> bool:
    """Whether TORCH_LOGS, or `torch._logging.set_logs`, names a logger, for which PyTorch then has a handler."""
    return bool(log_registry.is_log(logger))
