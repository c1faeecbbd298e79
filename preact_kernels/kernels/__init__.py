"""The backends. Each implements `contract.Kernels`; `reference` is the specification."""
