"""The passes, one file each; `fxpar.compiler` has their order."""
