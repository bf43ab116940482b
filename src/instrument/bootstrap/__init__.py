"""What if the script says nothing? Steps, regions and windows of a program that nobody edited."""
