"""Copy or link this folder into ComfyUI's custom_nodes; parkattn must be installed in ComfyUI's environment."""

from parkattn.hosts.comfyui_nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
