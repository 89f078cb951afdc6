"""Who may send what, and when it runs: keys, hosts, shares and the gate. Knows no engine."""
