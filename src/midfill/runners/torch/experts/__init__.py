"""Mixtures of experts that are larger than the device's memory.

After HybriMoE (Zhong et al., "HybriMoE: Hybrid CPU-GPU Scheduling and Cache Management for
Efficient MoE Inference", 2025, arXiv 2504.05897). All experts lie in the machine's memory, and each
layer has slots for some of them on the device. ``assignment`` decides which of the two computes an
expert, ``slots`` which experts stay on the device, ``offloaded`` computes and copies.
"""
