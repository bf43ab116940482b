"""Small inputs that were once read wrongly, each made here and compared with its right value."""
