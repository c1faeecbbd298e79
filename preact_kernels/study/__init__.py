"""Experiments on residual blocks, after "Identity Mappings in Deep Residual Networks".

`python -m preact_kernels.study --help` lists the commands. `pip install preact_kernels[study]`
installs the packages that they need.
"""
