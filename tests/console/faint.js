// Texts whose colour differs too little from what is behind them: WCAG AA wants 4.5 to 1.
(() => {
  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const linear = (one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (color.startsWith("color(")) return null;
      const [r, g, b, alpha = 1] = numbers(color);
      if (alpha > 0) return alpha === 1 ? [r, g, b] : null;
    }
    return null;
  };
  const found = new Set();
  for (const element of document.querySelectorAll("body *")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!hasText || element.closest("svg") || !element.checkVisibility({ opacityProperty: true })) continue;
    const ground = behind(element);
    if (!ground) continue;
    const [high, low] = [light(numbers(getComputedStyle(element).color)), light(ground)].sort((one, other) => other - one);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.add(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return [...found];
})();
