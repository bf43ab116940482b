"""Reads the files of other tools: Nsight Systems and Compute, rocprofv3, torch_npu, and torch.compile's log."""
