"""Every private PyTorch name that fxpar uses, as of torch 2.13 and 2.14: a new release may need changes here."""
