"""Ids without a bound: tables with a capacity, whose rows ids get when they come and lose when others need them."""
