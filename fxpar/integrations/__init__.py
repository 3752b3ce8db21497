"""Training loops of other libraries over distributed models: `accelerate`, and the `Trainer` of transformers."""
