"""The migrations, forward only and append only: NNNN_title.sql, each applied once, in order."""
