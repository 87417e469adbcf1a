from .gguf_profile import of_gguf as of_gguf
from .meta import counted as counted
