package co.cask.cdap.messaging.service;

import co.cask.cdap.common.conf.CConfiguration;
import co.cask.cdap.common.metrics.NoOpMetricsCollectionService;
import co.cask.cdap.common.utils.TimeProvider;
import co.cask.cdap.messaging.MessagingService;
import co.cask.cdap.messaging.store.TableFactory;

/** Creates CDAP's service with another clock, through a constructor that only this package can call. */
public final class MessagingServices {
  private MessagingServices() {
  }

  /** Returns a service that is not started, because a start only creates the system topics. */
  public static MessagingService create(CConfiguration conf, TableFactory tables, TimeProvider writeClock) {
    return new CoreMessagingService(conf, tables, writeClock, new NoOpMetricsCollectionService());
  }
}
