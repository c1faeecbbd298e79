def cpu_is_available(): return False
def cpu_load_error(): return ""
