"""What ``instrument run`` starts in each Python process: it finds the steps of a program that nobody edited."""
