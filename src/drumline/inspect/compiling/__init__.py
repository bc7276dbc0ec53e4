"""From a function to the text of the program that a compiler made of it."""
