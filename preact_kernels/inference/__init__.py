"""Copies of models for inference."""
