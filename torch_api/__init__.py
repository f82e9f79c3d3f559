"""The transforms for torch functions and tensors."""
