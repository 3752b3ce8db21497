"""Training loops of other libraries over distributed models: accelerate, Lightning, torchtitan and transformers."""
