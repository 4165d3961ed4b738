from .flash_attn_interface import flash_attn_func, flash_attn_varlen_func  # noqa: F401
