"""Will it record here? What is installed, whether ranges arrive in it, and the cure of what is broken."""
