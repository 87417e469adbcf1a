"""How to observe the routing of a live model, of transformers or of a GGUF file in llama.cpp."""
