"""Every private PyTorch name that fxpar uses, as of torch 2.13 to 2.15: a new release may need changes here."""
