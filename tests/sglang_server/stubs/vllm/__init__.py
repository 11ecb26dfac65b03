"""SGLang takes rotary embeddings from here where there is neither a GPU nor its own CPU kernels."""
