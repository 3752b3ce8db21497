"""fxpar: a torch.compile backend that turns a single-device training step into one program per rank."""

__version__ = "0.1.0"
