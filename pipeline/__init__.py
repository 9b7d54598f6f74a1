"""The models: plain arithmetic on tensors, usable without any daemon."""
