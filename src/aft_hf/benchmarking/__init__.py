"""Speed and memory of AFT models beside what they are compared with, in one run."""
