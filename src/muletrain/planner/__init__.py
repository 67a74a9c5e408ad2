"""Request + machine -> Plan, and what a plan costs. Pure functions, no torch."""
