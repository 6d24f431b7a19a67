"""Every message between processes. Imports msgspec and the standard library only."""
