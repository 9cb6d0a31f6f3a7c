"""What runs cost: device-hours by kind, money, energy and carbon, from journals alone."""
