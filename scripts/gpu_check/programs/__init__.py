"""Training scripts without `instrument`, as users write them; the first argument is the device."""
