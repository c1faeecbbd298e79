"""Conversion of existing models: finds norms, activations and convolutions, and fuses them."""
