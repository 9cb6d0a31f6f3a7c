"""Tables: rows with named columns that become texts with labels, prompts with completions, or conversations."""
