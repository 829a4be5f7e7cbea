"""Latent attention in parts, each of which a worker of its own keeps and reads.

After TPLA (Tang et al., "TPLA: Tensor Parallel Latent Attention for Efficient Disaggregated Prefill
& Decode Inference", 2025, arXiv 2508.15881). ``rotation`` turns the latents so that the parts
behave, ``calibration`` measures how, ``part`` computes one part, ``group`` adds the parts up,
``worker`` is the process of a part, ``messages`` what it is told, and ``runner`` the engine's view
of them all.
"""
