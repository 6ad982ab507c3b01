"""Real torch and safetensors files in place of references: the way out of Portus."""
