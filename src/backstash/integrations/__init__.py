"""Where backstash meets programs that it did not write: running and watching an unchanged training script."""
