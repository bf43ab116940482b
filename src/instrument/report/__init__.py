"""How a person sees it."""
