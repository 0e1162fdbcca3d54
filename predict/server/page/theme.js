// Runs before the first paint: a reader in the dark sees no white flash. Modules come later.
(() => {
  try {
    const theme = localStorage.getItem("regatta.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is off: the theme is the system's.
  }
})();
