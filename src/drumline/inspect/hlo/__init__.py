"""Parse the HLO text of compiled programs: instructions, loops, replica groups and source lines."""
