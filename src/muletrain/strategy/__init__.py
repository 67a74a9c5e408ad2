"""Where memory lives: resident, sharded over workers (zero1 to zero3) or streamed from the host, behind one seam: contract."""
