"""Schemas, argument checks, backend choice and autograd of all ops."""
