"""The planner in front of other servers: vLLM, SGLang, llama.cpp, or another midfill."""
