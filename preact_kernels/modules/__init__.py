"""The fused modules."""
