// Things that one can use, and that have no name for a screen reader.
[...document.querySelectorAll("button, a, input, textarea, select, [role=slider], [role=tree], [role=listbox], [tabindex='0']")]
  .filter((one) => one.checkVisibility())
  .filter((one) => !(one.textContent.trim() || one.getAttribute("aria-label") || one.labels?.length))
  .map((one) => one.outerHTML.slice(0, 80));
