"""Conversion of other people's models: finds BN-ReLU-Conv chains and runs them fused."""
