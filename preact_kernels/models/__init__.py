"""The networks of "Identity Mappings in Deep Residual Networks"."""
