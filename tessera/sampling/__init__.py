"""Sampling: a run or an export from the disk to something that can be called. The one path for all who use a model.

In: a folder of YAML, JSON and safetensors, none of which can carry code. Out: a `Session`, or a folder that travels.
"""
