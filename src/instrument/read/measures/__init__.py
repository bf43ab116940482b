"""What is read off the tables: steps and their lengths, launches, waits, and sums over regions and operators."""
