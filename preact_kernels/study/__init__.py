"""Experiments on residual units, after "Identity Mappings in Deep Residual Networks".

`python -m preact_kernels.study --help` lists the commands. `pip install preact_kernels[study]`
installs what they need beside torch.
"""
